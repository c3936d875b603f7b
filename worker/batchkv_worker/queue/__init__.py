"""Between Redis and the engine: takes jobs, keeps their leases, stores results. No MLX here.

==================  ===============================================================================
``rq_worker``       the worker as RQ sees it; ``startup`` checks, ``stop`` and ``watchdog`` end it
``session``         the main loop, with ``timers``
``job_puller``      pulls and leases jobs, gives some back
``dispatch``        how many jobs to pull or to give back
``passed_over``     the jobs that other workers must compute
``state``           the worker's rows, with ``in_flight``
``redis_side``      every call of Redis; ``background`` runs it on a thread of its own
``maintenance``     takes back lapsed leases and cleans up, with ``server_clock``
``abilities``       which rows that need more than the first version this worker can compute
``worker_record``   what ``batchkv workers`` shows
``model_watch``     whether the model's files have changed
==================  ===============================================================================
"""
