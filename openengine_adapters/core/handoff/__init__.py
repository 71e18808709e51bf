"""What prefill and decode servers of every engine share: a session's life, and how a decode server attaches to it.

The KV blocks travel between the engines by their own means. What those lack is a way to ask whether the blocks are
still there: a decode engine would read freed ones without a sign. So a prefill server has a small desk of its own,
where a decode server attaches to a session before its engine touches anything.
"""
