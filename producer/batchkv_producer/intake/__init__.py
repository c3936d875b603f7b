"""From files, pipes and dicts to checked rows.

==============  ===================================================================================
``source``      the input as bytes; ``spooling`` copies pipes to a file first
``reading``     the rows of a file, by ``formats``, ``json_array`` or, for speed, ``plain``
``given_rows``  the rows of a program's dicts
``body``        checks each field of a row, with ``checks`` and ``messages``
``prompting``   how plain prompts are marked; the worker renders the chat template
``model_vote``  which model the lines choose
``expected``    answers that the input expects
==============  ===================================================================================
"""
