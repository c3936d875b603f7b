"""Chooses the rows that are computed next, and admits rows. Knows rows and memory, no tensors.

=================  ================================================================================
``scheduler``      the waiting rows; forms groups for prefill and admits their rows, if they fit
``memory``         decides which rows fit: every comparison of bytes with the budget
``admission``      how many tokens to expect of an answer, and the budget itself
``prefill_group``  the rows whose prompts are computed together
``policy``         whose turn it is among waiting rows
``prefix_split``   which parts of a prompt are stored once for several rows
=================  ================================================================================
"""
