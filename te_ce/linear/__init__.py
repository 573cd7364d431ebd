"""The fused linear + loss: the logits of an output layer exist only chunk by chunk.

`chunks` (how large, which are kept), `products` (GEMMs), `call` (one call, checked and resolved), `vocabulary_walk`
(statistics and gradients, one chunk of the vocabulary after the other), `token_walk` (gradients made in forward, one
chunk of tokens after the other), `weight_gradient` (where the weight's goes), `nodes` and `weighted_node` (autograd).

Shape legend: N rows (tokens) of the whole batch, H hidden size, V_local columns of this rank, C columns of a chunk,
W ranks.
"""
