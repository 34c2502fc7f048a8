"""The life of a group: ranks meet, agree, notice that one is gone, and form another group."""
