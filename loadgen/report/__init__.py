"""Renders results and other documents as HTML, Markdown, CSV and JUnit, and on the terminal. It computes nothing."""
