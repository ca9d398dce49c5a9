"""Configuration files of training and serving programs, read as options of an estimate.

``documents`` reads JSON, YAML and TOML from strangers; ``shell`` parses command lines. Each program
has a file with a table that says what each of its entries becomes, converted by ``values``.
``question`` tells the programs apart by the entries of a file, and ``resolve`` turns what all the
files of a question say into options.
"""
