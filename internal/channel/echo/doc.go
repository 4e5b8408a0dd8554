// Package echo is the adapter that answers each message in its own conversation, for trying things out.
//
// It decides what is answered: messages with text, not those of the bot itself. It may import channel and fault, owns no
// goroutine, keeps no state, calls nothing and cannot fail. Tests: the table here and package channeltest.
package echo
