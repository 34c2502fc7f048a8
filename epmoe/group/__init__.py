"""The life of a group: ranks meet, agree, notice that one is gone, and go on in another group."""
