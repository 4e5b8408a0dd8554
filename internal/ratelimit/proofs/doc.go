// Package proofs remembers which addresses have lately proved to a channel, by a valid signature, that they speak for its
// provider: for an hour they spend the channel's own budget, and not the one that strangers share.
//
// A provider proves itself to the node that its webhook happened to reach, and the budget of strangers is spent on all
// nodes together. So that a stranger who spends it keeps no provider out of the other nodes, or of one that was restarted,
// proofs travel: a new one is told to the other nodes a moment later, again only when it was renewed five minutes after it
// was last told, by whichever node; and a node that joins, or whose connection was made anew, asks for all that there are.
// What travels is a keyed hash of channel and address, never an address, and how long it still counts.
//
// The laws of the state: of two words on one proof the longer one holds, so that words that are lost, repeated or
// overtaken change nothing that the next does not repair; and none counts for more than an hour from when it was heard. It
// is kept in memory only: after all nodes were started anew everybody has to prove himself once more.
//
// It imports ratelimit and cluster. Its one loop is Run. On failure, of a peer, a connection or a queue, an address
// has to prove itself to another node as if it were new there. Tests join several of them without sockets.
package proofs
