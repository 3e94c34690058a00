"""The judge as a reward service over HTTP.

`protocol` holds the messages, `ledger` what a restart remembers, `desk` the queue and who waits for what, `app` the HTTP
side, `server` its life from start to shutdown, and `client` the other end. See docs/scale.md.
"""
