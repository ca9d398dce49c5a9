"""Files, directories, bundles and standard input become one case."""
