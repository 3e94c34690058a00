"""Offers the judge as a reward service over HTTP.

`protocol` holds the messages, `store` what a restart remembers, `queue` the queue and who waits for what, `app` the HTTP
side, `server` its life from start to shutdown, and `client` the other end. See docs/rewards.md.
"""
