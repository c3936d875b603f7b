"""A gateway instead of Redis: the client of its API under ``/batchkv/v1``.

==============  ===================================================================================
``terms``       the options of a submit and of a retry as headers, for both sides
==============  ===================================================================================
"""
