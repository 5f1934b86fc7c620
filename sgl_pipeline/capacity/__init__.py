"""The command `capacity`: the request rate that holds latency targets, predicted and measured."""
