"""Many clients of all sorts and requests that could hurt: does anything fail, stick or leak?"""
