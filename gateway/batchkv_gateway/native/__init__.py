"""The API of batchkv itself, under ``/batchkv/v1``: batches of the queue, by the CLI's functions.

===============  ==================================================================================
``owners``       who may see a batch of the queue
``listing``      pages of batches, those of OpenAI's API included
``rows``         the rows of a batch, by line
``stream``       results as lines of JSON, as they end
``queries``      reads the query of a request
``visible``      the batch that a request names
``..._routes``   the routes of batches, of their results and rows, and of workers
===============  ==================================================================================
"""

PREFIX = "/batchkv/v1"
