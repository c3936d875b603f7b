"""Reading results back, and writing them to a file.

===============  ==================================================================================
``stored_rows``  reads results from Redis; ``bounded`` limits how much is read at once
``output``       makes an output line of a result
``target``       where results go: a file, or standard output
``outfile``      writes OUT and OUT.errors.jsonl, with ``line_file`` and ``line_set``
``aside``        moves an OUT of another generation to OUT.1.old.jsonl
``failures``     groups the failed rows by code, for messages; writes no file
===============  ==================================================================================
"""
