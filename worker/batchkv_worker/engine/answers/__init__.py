"""What an answer has besides text: the model's thought and its tool calls.

=================  ================================================================================
``rows``           gives each row its reader, its guide and the grammar of a call that it must make
``answer_format``  how a model marks thoughts and calls
``reader``         divides a whole output: ``split`` at markers, ``harmony`` for gpt-oss
``tool_calls``     parses the text of calls, within limits
``thinking``       guides: a budget for thoughts, and a grammar that begins after them
``forced_calls``   the grammar of a call, in the model's own style (``call_styles``)
=================  ================================================================================
"""
