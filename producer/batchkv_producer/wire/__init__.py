"""What goes over the wire: jobs, results, keys in Redis, and the moves that change them.

=================  ================================================================================
``job``            requests and results as bytes; ``params``: the parameters of generation
``redis_keys``     every key in Redis
``transitions``    the moves of a job (pull, renew, finish, reap ...), drawn and called; each is a
                   script of the same name in ``lua/``, which ``scripts`` sends; ``arrivals`` has
                   those of a submit, ``transition_types`` what they take and give
``maker``          which worker may compute which rows
``suspects``       rows that a worker had started when it died
``batch_options``  priority, deadline, dedupe and the like; ``kept_defaults``: flags of generation
``row_facts``      what a batch stores of each row beside its job; ``stamp``: of a duplicate
=================  ================================================================================
"""
