"""The wire format: jobs, results, keys in Redis, and the moves that change them.

=================  ================================================================================
``job``            requests and results as bytes; ``params``: the parameters of generation;
                   ``constraint``: what an answer's text must match; ``choice``: one answer of a row
``redis_keys``     every key in Redis
``transitions``    the moves of a job (pull, renew, finish, reap ...), drawn and called; each is a
                   script of the same name in ``lua/``, which ``scripts`` sends; ``arrivals`` has
                   the moves of a submit, ``transition_types`` their arguments and results
``maker``          which worker may compute which rows
``suspects``       rows that a worker had started when it died
``batch_options``  priority, deadline, dedupe and the like; ``kept_defaults``: flags of generation
``row_facts``      facts about each row that outlive its job
``stamp``          the custom_id before the copied result of a duplicate
``cache_note``     a worker's note about a row's hits in the shared cache
=================  ================================================================================
"""
