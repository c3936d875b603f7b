"""Who owns which columns of the decode slots, and what a step reads of them. No weights here."""
