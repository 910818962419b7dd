"""The dry run: what the first batch shows about a model and its loss, before any weight changes."""
