"""FD1xx: free memory that cannot be used."""
