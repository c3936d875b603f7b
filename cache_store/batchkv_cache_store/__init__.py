"""Content-addressed store of packed KV blocks. Knows no MLX: blocks are bytes.

============  ====================================================================================
``keys``      what names a block: namespace, tenant and all tokens up to its end
``block``     the format of a block (with ``header`` and ``seal``): ``encode``, ``decode``
``names``     a block's name in every tier
``tiers``     memory, disk, Redis, objects (S3): one contract, in ``tiers.base``
``store``     the tiers behind one face (with ``lookup``, ``writer``, ``guarded``, ``breaker``)
``gate``      whether loading is quicker than computing
``lease``     who computes a block that is missing
``errors``    the error tree, and the reasons for which bytes are refused
============  ====================================================================================
"""
