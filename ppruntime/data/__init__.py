"""Which tokens a micro-batch holds, and the files they come from.

    batches        ids of step and micro-batch: start here, at `open_data`
    order          permutations that are pure functions of a key
    sources        sequences by number: of a token file, or made up
    token_file     ids of documents on disk, memory-mapped
    token_writer   writes them, whole or not at all
    corpus         documents out of text, JSON lines or Python's own library
    tokenizer      text -> ids

This file imports nothing: the command line makes token files without torch.
"""
