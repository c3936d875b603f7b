"""``python -m batchkv_producer`` is the ``batchkv`` command."""

from batchkv_producer.entry import main

main()
