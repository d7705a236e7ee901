"""Accept or reject a box or a cluster: does distributed training work here, and if not, why?"""
