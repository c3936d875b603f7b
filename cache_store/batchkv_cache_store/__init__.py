"""Content-addressed store of packed KV blocks. Knows no MLX: blocks are bytes.

===================  ==============================================================================
``keys``             what names a block: namespace, tenant and all tokens up to its end
``blocks``           the format of a block: ``block`` encodes and decodes it, with ``header`` and
                     ``seal``; ``peek`` reads its first bytes; ``names`` are those in every tier;
                     ``manifests`` say what a namespace is of, in plain text
``tiers``            memory, disk, Redis, objects (S3): one contract, in ``tiers.base``
``opening``          from settings to a store (with ``tiers.specs``: what users write)
``store``            all tiers as one (with ``lookup``, ``writer``, ``guarded``, ``breaker``)
``load_or_compute``  whether loading is quicker than computing
``lease``            who computes a block that is missing
``uses``             which blocks are worth keeping and writing
``upkeep``           a cache seen from outside: ``contents``, ``check``, ``collect``
``cli``              ``batchkv cache``
``errors``           the error tree, and the reasons for which bytes are refused
===================  ==============================================================================
"""
