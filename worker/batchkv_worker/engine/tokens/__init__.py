"""From a request to tokens, and from sampled tokens to its answer.

===============  ==================================================================================
``requests``     checks a request and fills in defaults: it becomes a row
``prompts``      renders the chat template with a row's ``template_options``, and tokenizes
``text_limits``  limits for ``requests``: refuses what cannot fit before tokenizing it takes long
``choices``      a row with several answers: its choices as sequences, and their ends as one event
``sampling``     chooses the next token of every row
``guide``        bit masks of the tokens that a row may have next
``outputs``      decides which rows ended (end token, stop string, ``max_tokens``); makes texts
===============  ==================================================================================
"""
