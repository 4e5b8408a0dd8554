// Package connlimit bounds the connections that are open at one time: those of one client, and all.
//
// It decides, when a connection is accepted and before a byte of it is read, whether it is one too many. A client is an address
// as the rate limits count it ([ratelimit.Network]): an IPv4 address, or the /64 of an IPv6 one. Both counts are taken in one
// step and belong to the connection: they are given back by its Close, however often and by however many that is called,
// also when the connection was hijacked. So the table of clients never has more entries than there are open connections.
//
// One too many is answered like every refusal, by a whole HTTP response that says when to come back ([Config.Answer]), and
// closed. The goodbye waits a moment for the request, since clients do not expect an answer to what they have not said, and after
// it for the client's end, since to close a socket with unread bytes resets it, and the answer is lost. It
// takes two seconds at most and never the time of the accept loop; there are [MaxGoodbyes] at most, and beyond that the
// answer is written and the connection closed at once.
//
// golang.org/x/net/netutil.LimitListener does something else: it stops accepting at its cap, so that whoever fills it keeps all
// others waiting in the kernel's queue without a word; it knows one number for all; and its connections hide the methods of
// *net.TCPConn that net/http uses to send files and to close well.
//
// It imports ratelimit, for what counts as one client, and prometheus through an injected Registerer.
//
// Goroutines: one for each goodbye. They end with the listener's Close, which cuts them.
//
// On failure: an error of accept, such as no file descriptor left, is counted, logged at most once a second and handed on;
// net/http waits and tries again. Nothing else can fail.
//
// Tests speak over real sockets, from several addresses of 127.0.0.0/8.
package connlimit
