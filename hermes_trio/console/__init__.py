"""The console: a static page, served by the same process, and the routes that sign a browser in."""
