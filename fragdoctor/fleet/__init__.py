"""The many ranks of one job: each is summarized on a worker, and all are merged into a report."""
