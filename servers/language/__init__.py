"""Language models: what is served, the engines that generate token ids, and the reference for their answers.

No text and no protocol: prompts and answers are token ids. The server in `servers.native` speaks to clients.
"""
