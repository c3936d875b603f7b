"""What is computed next, and what is admitted. Knows rows and memory, no tensors.

=================  ================================================================================
``scheduler``      the waiting rows; forms groups for prefill and admits their rows, if they fit
``memory``         says what fits: every comparison of bytes with the budget
``admission``      how many tokens to expect of an answer, and the budget itself
``prefill_group``  the rows whose prompts are computed together
``policy``         whose turn it is among waiting rows
``prefix_split``   which parts of a prompt are stored once for several rows
=================  ================================================================================
"""
