"""The commands of `abserve` on the client's side: options in, work done elsewhere, tables out."""
