"""Token slices: one microbatch's sequences cut along the tokens, which pass through the stages one
slice after another (TeraPipe, ICML 2021).

    places     where the tokens lie in the dims of a value
    bounds     what values known before the step hold at given tokens
    masking    the proof that later tokens do not matter to a slice
    reading    how one operator runs on a slice
    analysis   how a whole program runs in slices, or why it cannot
    moves      slices, paddings and joins along the tokens
    key_moves  the same along their keys
    blocks     loops over blocks of queries
    key_blocks loops over blocks of keys, and `later_blocks` that those behind a slice do nothing
    windows    convolutions along the tokens
    writer     the program of the slices
"""
