"""SGLang's sockets and messages: requests in, tokens and answers out."""
