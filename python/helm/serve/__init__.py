"""The HTTP server: routes, formats of OpenAI, the chat page. Needs the extra `serve`."""
