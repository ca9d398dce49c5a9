"""What each command says: one file a command fills a document from its result."""
