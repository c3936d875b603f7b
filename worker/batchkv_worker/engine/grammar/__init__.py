"""Answers that match a JSON schema, a regex, a list of choices or a grammar, by llguidance.

=============  ====================================================================================
``grammars``   the grammars of one engine's rows: compiled once each, off the engine's thread
``compiling``  the thread that compiles, after a trial
``trial``      the process that tries a grammar first, with limits, since nothing ends a thread
``text``       a constraint in llguidance's own language
``available``  whether llguidance can be loaded
``tokens``     the model's tokenizer as llguidance reads it
``guide``      the guide of one row: which tokens its grammar allows next
``masks``      the bit masks of all rows of a step
=============  ====================================================================================
"""
