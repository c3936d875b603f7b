"""The worker's end of the shared store: it looks up prefixes and writes new blocks.

============  =====================================================================================
``access``    from settings to a store, before the model is loaded
``identity``  the manifest of the loaded model: which blocks are its own
``client``    what the engine calls: which rows wait for which lookups
``pending``   lookups under way; ``fetch`` runs them on threads
``outbox``    new blocks on their way to ``batchkv_cache_store.store``, whose thread writes them
``convert``   float blocks of the same model, packed into this worker's scheme
============  =====================================================================================
"""
