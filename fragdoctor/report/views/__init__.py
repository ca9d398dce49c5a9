"""What each command says: each file fills a document from the result of one command."""
