"""From what the user names to this rank's micro-batches.

files.py      a file, folder or glob -> rows, each with its file and line           (control and worker)
formats.py    rows -> which of four shapes they have; one row -> one example        (control and worker)
peek.py       a fast look before the run                                            (control)
tokens.py     examples -> token ids, with the supervised ones marked                (worker)
source.py     rows from files or from the hub, and what their content is told by    (worker)
store.py      tokenised rows on disk: complete or absent, built by one process      (worker)
prepare.py    all of it, once per run                                               (worker)
preview.py    the first examples as the model sees them                             (worker)
sharding.py   global batches, the same for every layout -> a rank's micro-batches   (worker)
"""
