"""From files, pipes and dicts to checked rows.

=================  ================================================================================
``source``         the input as bytes; ``spooling`` copies pipes to a file first
``reading``        the rows of a file, by ``formats``, ``json_array`` or, for speed, ``plain``
``given_rows``     the rows of a program's dicts
``fields``         the table of all fields: which are used, ignored or refused, and their ``rules``
``body``           reads a row's fields by the table, with ``checks`` and ``messages``
``answer_format``  what a row asks of its answer's text
``chat_options``   how a chat row uses its tools, and how much it thinks
``prompting``      how plain prompts are marked; the worker renders the chat template
``model_vote``     which model the lines choose
``expected``       answers that the input expects
=================  ================================================================================
"""
