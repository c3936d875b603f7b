"""Content-addressed store of packed KV blocks. Blocks are bytes; MLX is not imported.

===================  ==============================================================================
``keys``             the key of a block: a hash of namespace, tenant and all tokens up to its end
``blocks``           the format of a block: ``block`` encodes and decodes it, with ``header`` and
                     ``seal``; ``peek`` reads its first bytes; ``names`` has the names in tiers;
                     ``manifests`` describe namespaces in plain text
``tiers``            memory, disk, Redis, objects (S3): one contract, in ``tiers.base``
``opening``          makes a store of settings (``tiers.specs`` parses the text that users write)
``store``            all tiers as one (with ``lookup``, ``writer``, ``guarded``, ``breaker``)
``load_or_compute``  decides whether loading is quicker than computing
``lease``            decides which worker computes a missing block
``uses``             decides which blocks to keep and to write
``upkeep``           reads a cache from outside: ``contents``, ``check``, ``collect``
``cli``              ``batchkv cache``
``errors``           the error tree, and the reasons for refusing bytes
===================  ==============================================================================
"""
