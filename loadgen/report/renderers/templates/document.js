"use strict";
// Draws the figures, which the page holds as JSON; colours are names of CSS variables, so both schemes work.
(function () {
  const touch = window.matchMedia("(hover: none)").matches;
  const scheme = window.matchMedia("screen and (prefers-color-scheme: dark)");

  function resolved(value, style) {
    if (typeof value === "string") {
      return value.startsWith("--") ? style.getPropertyValue(value).trim() : value;
    }
    if (Array.isArray(value)) return value.map((item) => resolved(item, style));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, resolved(item, style)]));
    }
    return value;
  }

  function merged(base, more) {
    const result = { ...base };
    for (const [key, value] of Object.entries(more || {})) {
      const nested = value && typeof value === "object" && !Array.isArray(value);
      result[key] = nested ? merged(base[key] || {}, value) : value;
    }
    return result;
  }

  function draw(holder) {
    const figure = JSON.parse(document.getElementById(holder.dataset.figure).textContent);
    const style = getComputedStyle(document.documentElement);
    const narrow = holder.clientWidth < 640;
    const shown = figure.views.length ? figure.views[Number(holder.dataset.view || 0)] : null;
    const data = shown ? shown.traces.map((index) => figure.data[index]) : figure.data;
    const ink = "--ink", grid = "--grid";
    const axis = { gridcolor: grid, linecolor: grid, tickcolor: grid, color: ink, title: { font: { size: 13 } } };
    const base = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: style.fontFamily, size: 13, color: ink },
      margin: { l: 12, r: 16, t: 52, b: 48 }, hovermode: "closest",
      hoverlabel: { bgcolor: "--card", bordercolor: "--grid", font: { color: ink } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: "--muted", activecolor: ink },
    };
    let layout = merged(merged(base, figure.layout), shown ? shown.layout : {});
    for (const key of Object.keys(layout)) {
      if (/^[xy]axis\d?$/.test(key)) layout[key] = merged(axis, layout[key]);
    }
    if (narrow) {
      layout.font.size = 11;
      // Two plots side by side stand one above the other.
      const right = layout.xaxis2 && layout.xaxis2.domain && layout.xaxis2.domain[0] > 0.5;
      if (right) {
        layout.xaxis.domain = layout.xaxis2.domain = [0, 1];
        layout.yaxis.domain = [0.58, 1];
        layout.yaxis2.domain = [0, 0.42];
        layout.height *= 1.6;
      }
    }
    holder.textContent = "";
    Plotly.newPlot(holder, resolved(data, style), resolved(layout, style), {
      responsive: true, displaylogo: false, displayModeBar: touch ? false : "hover",
      // One by one, because the default set has a button that uploads the chart to Plotly.
      modeBarButtons: [["toImage"], ["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", "resetScale2d"]],
      plotlyServerURL: "",
      toImageButtonOptions: { format: "svg", filename: "abserve-" + holder.id },
    });
  }

  function buttons(holder) {
    const figure = JSON.parse(document.getElementById(holder.dataset.figure).textContent);
    if (figure.views.length < 2) return;
    const row = document.createElement("div");
    row.className = "views";
    row.setAttribute("role", "group");
    figure.views.forEach((view, index) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = view.label;
      button.setAttribute("aria-pressed", String(index === 0));
      button.addEventListener("click", () => {
        row.querySelectorAll("button").forEach((other) => other.setAttribute("aria-pressed", "false"));
        button.setAttribute("aria-pressed", "true");
        holder.dataset.view = String(index);
        Plotly.purge(holder);
        draw(holder);
      });
      row.append(button);
    });
    holder.before(row);
  }

  async function load() {
    const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (byte) => byte.charCodeAt(0));
    const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(unpacked).text();
    document.head.append(script);
  }

  // A chart in closed details has no width; it is drawn when they open.
  function redraw(holder) {
    if (!holder.clientWidth) return;
    Plotly.purge(holder);
    draw(holder);
  }

  function drawAll(holders) {
    holders.forEach((holder) => { buttons(holder); redraw(holder); });
    scheme.addEventListener("change", () => holders.forEach(redraw));
    let width = window.innerWidth;
    window.addEventListener("resize", () => {
      if ((width < 700) !== (window.innerWidth < 700)) holders.forEach(redraw);
      width = window.innerWidth;
    });
    document.querySelectorAll("details").forEach((details) => {
      details.addEventListener("toggle", () => details.querySelectorAll(".chart").forEach(redraw));
    });
  }

  // Paper has nothing to open.
  const opened = [];
  window.addEventListener("beforeprint", () => {
    document.querySelectorAll("details:not([open])").forEach((details) => { details.open = true; opened.push(details); });
  });
  window.addEventListener("afterprint", () => opened.splice(0).forEach((details) => { details.open = false; }));

  function excuse(holder) {
    holder.textContent = "This chart needs a browser from 2023 or later; its figures are in the tables.";
  }

  const holders = [...document.querySelectorAll(".chart")];
  if (holders.length) load().then(() => drawAll(holders), () => holders.forEach(excuse));

  document.querySelectorAll(".filter").forEach((filter) => {
    filter.hidden = false;
    filter.addEventListener("input", () => {
      const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      const hide = (text, ...parts) => parts.forEach((part) => { part.hidden = !words.every((word) => text.toLowerCase().includes(word)); });
      document.querySelectorAll("tbody tr:not(.under)").forEach((row) => {
        const more = row.matches(".open") ? [row.nextElementSibling] : [];
        hide([row, ...more].map((part) => part.textContent).join(" "), row, ...more);
      });
      document.querySelectorAll(".card > .chart").forEach((chart) => hide(chart.getAttribute("aria-label"), chart.parentNode));
    });
  });

  document.querySelectorAll(".copy").forEach((copy) => {
    if (!navigator.clipboard) return;
    copy.hidden = false;
    copy.addEventListener("click", () => {
      navigator.clipboard.writeText(copy.previousElementSibling.textContent);
      copy.textContent = "copied";
    });
  });
})();
