"""Configuration files of training and serving programs, read as options of an estimate.

``documents`` reads JSON, YAML and TOML from strangers; ``shell`` takes command lines apart. Each
program has a file with a table of its entries: what an entry becomes, or why it becomes nothing.
``formats`` tells the programs apart by what stands in a file, and ``resolve`` turns what all files
of a question say together into options.
"""
