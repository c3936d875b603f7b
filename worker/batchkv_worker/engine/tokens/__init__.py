"""From a request to tokens, and from sampled tokens to its answer.

===============  ==================================================================================
``requests``     renders the chat template, tokenizes, fills in defaults: a request becomes a row
``text_limits``  limits for ``requests``: refuses what cannot fit before tokenizing it takes long
``sampling``     chooses the next token of every row
``guide``        bit masks of the tokens that a row may have next
``outputs``      decides which rows ended (end token, stop string, ``max_tokens``); makes texts
===============  ==================================================================================
"""
