"""The HTML page's data: each graphic has its own module; the template only places the graphics."""
