"""What the HTML page shows, as data: each graphic has its module, the template only places them."""
