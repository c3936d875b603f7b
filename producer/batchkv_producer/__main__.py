"""``python -m batchkv_producer`` is the ``batchkv`` command."""

from batchkv_producer.cli import main

main()
