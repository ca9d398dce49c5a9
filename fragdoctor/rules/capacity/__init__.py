"""FD2xx: more memory needed than there is, and peaks."""
