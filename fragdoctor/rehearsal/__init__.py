"""``fragdoctor rehearse``: the unchanged program, without a GPU, with its real memory."""
