"""Content-addressed store of packed KV blocks. Knows no MLX: blocks are bytes.

=============  ====================================================================================
``keys``       what names a block: namespace, tenant and all tokens up to its end
``block``      the format of a block (with ``header`` and ``seal``): ``encode``, ``decode``
``peek``       what its first bytes say
``manifests``  what a namespace is of, in plain text beside its blocks
``names``      names of blocks and manifests in every tier
``tiers``      memory, disk, Redis, objects (S3): one contract, in ``tiers.base``
``opening``    from settings to a store (with ``tiers.specs``: what users write)
``store``      the tiers behind one face (with ``lookup``, ``writer``, ``guarded``, ``breaker``)
``gate``       whether loading is quicker than computing
``lease``      who computes a block that is missing
``contents``   what a tier holds, seen from outside (with ``check``, ``collect``)
``cli``        ``batchkv cache``
``errors``     the error tree, and the reasons for which bytes are refused
=============  ====================================================================================
"""
