// Package overview answers at any node for the whole cluster what operators ask of
// limits: what is decided and refused, how one budget is used, what the last hour
// asked for; and it resets a counter on every node: the one place from which all are
// asked to, with one moment, the reset's version.
//
// It decides nothing about requests. Each node tells what it knows itself; whoever is
// asked calls the others at the same time, with a deadline, and adds up. A node that
// does not answer, hangs or has died lately is in the result with its error: half a
// picture is what an operator needs when half of the nodes are in trouble, as long as
// it says so. Errors are words for operators; their causes are logged. What travels is JSON in which unknown
// members are ignored, so that nodes of two versions understand each other.
//
// It imports ratelimit and cluster. It owns no goroutine; those of a question end with
// it. Tests join several of them without sockets.
package overview
